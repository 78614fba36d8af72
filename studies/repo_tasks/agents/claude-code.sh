#!/bin/sh
# Claude Code, headless, in the folder that it is started in. The task comes on standard input; the answer goes to standard output.
# Needs `claude` on the PATH. It speaks Anthropic's dialect, and reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY by itself.
# CONTEXT is what the server's --max-model-len says; MAX_TOKENS the longest answer.
set -eu
export ANTHROPIC_MODEL=policy ANTHROPIC_DEFAULT_HAIKU_MODEL=policy@small ANTHROPIC_DEFAULT_SONNET_MODEL=policy
export ANTHROPIC_DEFAULT_OPUS_MODEL=policy CLAUDE_CODE_SUBAGENT_MODEL=policy@subagent
export CLAUDE_CODE_MAX_CONTEXT_TOKENS="${CONTEXT:-32768}" CLAUDE_CODE_MAX_OUTPUT_TOKENS="${MAX_TOKENS:-1024}"
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
export DISABLE_TELEMETRY=1 DISABLE_ERROR_REPORTING=1 IS_SANDBOX=1
code=0
said=$(claude --print --dangerously-skip-permissions --strict-mcp-config ${TURNS:+--max-turns "$TURNS"}) || code=$?
printf '%s\n' "$said"
case $said in *"Reached max turns"*) exit 0 ;; esac     # what it did until then counts
exit "$code"
