#!/bin/sh
# Train a program that knows nothing of training: it reads OPENAI_BASE_URL and OPENAI_API_KEY, asks its model, prints an answer.
#
#   sh docs/examples/black_box.sh TASKS AGENT [ARGUMENT...]
#
# TASKS: a file with one task per line: an id, a tab, the expected answer, a tab, the question. AGENT is called with the
# question as its last argument. GROUP (default 8) must be the run's batch.group_size: episodes of one task are compared
# with each other. Goes through the file again and again until the run is over. SWARM_URL and SWARM_TOKEN name the server.
# Start a run first: swarm run start --set limits.steps=5
set -u
SWARM=${SWARM:-swarm}
GROUP=${GROUP:-8}
TAB=$(printf '\t')
tasks=$1
shift
[ -s "$tasks" ] || { echo "no tasks in $tasks" >&2; exit 2; }

# one episode: TASK_ID EXPECTED QUESTION AGENT...
episode() {
    id=$1 expected=$2 question=$3
    shift 3
    exports=$($SWARM episode claim --task "$id" --export) || return
    eval "$exports"                             # OPENAI_BASE_URL, OPENAI_API_KEY, SWARM_EPISODE, SWARM_LEASE
    if answer=$("$@" "$question" </dev/null); then
        if [ "$answer" = "$expected" ]; then reward=1; else reward=0; fi
        $SWARM episode end --reward "$reward" >/dev/null
    else
        $SWARM episode abort --reason "the agent exited with $?" >/dev/null
    fi
}

while :; do
    while IFS="$TAB" read -r id expected question <&3 || [ -n "$id" ]; do
        attempt=0
        while [ "$attempt" -lt "$GROUP" ]; do
            attempt=$((attempt + 1))
            (episode "$id" "$expected" "$question" "$@")
            case $? in
                0 | 4 | 5) ;;                   # 4: not now; 5: too late, which costs this episode alone
                3) echo "the run is over" >&2; exit 0 ;;
                *) exit 1 ;;
            esac
        done
    done 3<"$tasks"
done
