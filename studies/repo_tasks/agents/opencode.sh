#!/bin/sh
# OpenCode, headless, in the folder that it is started in. The task comes on standard input; the answer goes to standard output.
# Needs `opencode` on the PATH. It speaks chat completions; endpoints stand in its settings.
set -eu
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1
export OPENCODE_CONFIG_CONTENT="{\"share\": \"disabled\", \"autoupdate\": false, \"permission\": \"allow\",
  \"model\": \"swarm/policy\", \"small_model\": \"swarm/policy@small\",
  \"provider\": {\"swarm\": {\"npm\": \"@ai-sdk/openai-compatible\", \"name\": \"swarm\",
    \"options\": {\"baseURL\": \"$OPENAI_BASE_URL\", \"apiKey\": \"$OPENAI_API_KEY\"},
    \"models\": {\"policy\": {\"limit\": {\"context\": ${CONTEXT:-32768}, \"output\": ${MAX_TOKENS:-1024}}},
      \"policy@small\": {\"limit\": {\"context\": ${CONTEXT:-32768}, \"output\": ${MAX_TOKENS:-1024}}}}}}}"
exec opencode run "$(cat)"
