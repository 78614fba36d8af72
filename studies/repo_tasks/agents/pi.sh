#!/bin/sh
# pi, headless, in the folder that it is started in. The task comes on standard input; the answer goes to standard output.
# Needs `pi` on the PATH. It speaks chat completions; endpoints stand in a file of its own.
set -eu
export PI_CODING_AGENT_DIR="$HOME/pi"
mkdir -p "$PI_CODING_AGENT_DIR"
cat >"$PI_CODING_AGENT_DIR/models.json" <<JSON
{"providers": {"swarm": {
  "baseUrl": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY", "api": "openai-completions",
  "compat": {"supportsDeveloperRole": false, "supportsReasoningEffort": false, "supportsStore": false},
  "models": [{"id": "policy", "contextWindow": ${CONTEXT:-32768}, "maxTokens": ${MAX_TOKENS:-1024}}]
}}}
JSON
exec pi --print --offline --no-session --provider swarm --model policy "$(cat)"
