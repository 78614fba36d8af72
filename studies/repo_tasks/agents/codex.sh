#!/bin/sh
# Codex, headless, in the folder that it is started in. The task comes on standard input; the answer goes to standard output.
# Needs `codex` on the PATH. It speaks the Responses dialect; endpoints stand in its settings, which read OPENAI_API_KEY.
set -eu
exec codex exec --skip-git-repo-check --sandbox danger-full-access --ephemeral --model policy \
    -c model_provider=swarm -c model_providers.swarm.name=swarm -c model_providers.swarm.wire_api=responses \
    -c "model_providers.swarm.base_url=\"$OPENAI_BASE_URL\"" -c model_providers.swarm.env_key=OPENAI_API_KEY \
    -c "model_context_window=${CONTEXT:-32768}" -
