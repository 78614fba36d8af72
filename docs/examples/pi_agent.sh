#!/bin/sh
# A coding agent from npm, unchanged, as the AGENT of black_box.sh: `pi` looks around in a folder with its own tools, and answers.
#
#   npm install --prefix pi @mariozechner/pi-coding-agent@0.73.1      # Node 20.6 or newer
#   PI=$PWD/pi/node_modules/.bin/pi OPTIONS="--env PI" sh docs/examples/black_box.sh TASKS sh docs/examples/pi_agent.sh
#
# It knows endpoints by a file of its own, where the two variables are put. FOLDER (default: an empty one) is where it works.
# Its tools here only read; a model in training should get `bash` or `write` in a container alone.
set -eu
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
mkdir "$home/empty"
cat >"$home/models.json" <<JSON
{"providers": {"swarm": {
  "baseUrl": "$OPENAI_BASE_URL", "apiKey": "OPENAI_API_KEY", "api": "openai-completions",
  "compat": {"supportsDeveloperRole": false, "supportsReasoningEffort": false, "supportsStore": false},
  "models": [{"id": "policy", "contextWindow": ${CONTEXT:-32768}, "maxTokens": ${MAX_TOKENS:-256}}]
}}}
JSON
cd "${FOLDER:-$home/empty}"
PI_CODING_AGENT_DIR=$home "${PI:-pi}" --print --offline --no-session --no-context-files --no-extensions --no-skills \
    --no-prompt-templates --tools "${TOOLS:-read,ls}" --provider swarm --model policy "$@"
