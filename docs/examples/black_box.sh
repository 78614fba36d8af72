#!/bin/sh
# Train a program that knows nothing of training: it reads OPENAI_BASE_URL and OPENAI_API_KEY, asks its model, prints an answer.
#
#   sh docs/examples/black_box.sh TASKS AGENT [ARGUMENT...]
#
# TASKS: a file with one task per line: an id, a tab, the expected answer, a tab, the question. AGENT is called with the
# question as its last argument. GROUP (default 8) must be the run's batch.group_size: episodes of one task are compared
# with each other. Goes through the file again and again until the run is over. SWARM_URL and SWARM_TOKEN name the server;
# OPTIONS are further options of `swarm episode run`, say "--env HTTPS_PROXY --port 443".
# Start a run first: swarm run start --set limits.steps=5
set -u
SWARM=${SWARM:-swarm}
GROUP=${GROUP:-8}
TAB=$(printf '\t')
tasks=$1
shift
[ -s "$tasks" ] || { echo "no tasks in $tasks" >&2; exit 2; }
# The answer on standard input, the expected one in the environment: arguments of a program can be read by all.
scorer="sh -c 'if [ \"\$(cat)\" = \"\$EXPECTED\" ]; then echo 1; else echo 0; fi'"

while :; do
    while IFS="$TAB" read -r id expected question <&3 || [ -n "$id" ]; do
        attempt=0
        while [ "$attempt" -lt "$GROUP" ]; do
            attempt=$((attempt + 1))
            EXPECTED=$expected $SWARM episode run --task "$id" --hide "$tasks" --scorer "$scorer" --scorer-env EXPECTED \
                ${OPTIONS:-} -- "$@" "$question" 3<&- >/dev/null
            case $? in
                0 | 5 | 6) ;;                   # 5, 6: this attempt is lost, and is offered again
                4) sleep 2 ;;                   # not now: the server is busy, or away
                3) echo "the run is over" >&2; exit 0 ;;
                *) exit 1 ;;
            esac
        done
    done 3<"$tasks"
done
