#!/usr/bin/env bash
# curl and a shell: a tool in two turns, the first streamed as raw events. Needs curl and python3 (to take JSON apart).
set -euo pipefail
tools='[{"type":"function","function":{"name":"add","description":"Add two numbers.","strict":true,"parameters":{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"integer"}},"required":["a","b"],"additionalProperties":false}}}]'
sampling=${TEMPERATURE:+\"temperature\":$TEMPERATURE,}
user='{"role":"user","content":"What is 17 + 25? Use the tool."}'

post() {  # the answer's body, or curl's own failure
    curl --silent --show-error --fail-with-body --no-buffer "$BASE_URL/chat/completions" \
        --header "Authorization: Bearer $API_KEY" --header 'Content-Type: application/json' --data @-
}

first=$(post <<< "{\"model\":\"$MODEL\",\"messages\":[$user],\"tools\":$tools,\"tool_choice\":\"required\",\"stream\":true,$sampling\"max_tokens\":120}")
said=$(python3 -c '
import json, sys
calls, done = {}, False
for line in sys.stdin:
    if not line.startswith("data: "):
        continue
    if line.strip() == "data: [DONE]":
        done = True
        continue
    for choice in json.loads(line[6:])["choices"]:
        for part in choice["delta"].get("tool_calls") or []:
            call = calls.setdefault(part["index"], {"id": part.get("id"), "name": "", "arguments": ""})
            call["name"] += part["function"].get("name") or ""
            call["arguments"] += part["function"].get("arguments") or ""
assert done and calls, "no whole stream with a tool call came"
told = [{"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls.values()]
messages = [{"role": "assistant", "content": None, "tool_calls": told}]
for call in told:
    numbers = json.loads(call["function"]["arguments"])
    good = isinstance(numbers, dict) and set(numbers) == {"a", "b"}  # a small model may write what it likes
    result = str(numbers["a"] + numbers["b"]) if good else "Give two numbers, a and b."
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(json.dumps(messages)[1:-1])
' <<< "$first")
second=$(post <<< "{\"model\":\"$MODEL\",\"messages\":[$user,$said],\"tools\":$tools,$sampling\"max_tokens\":40}")
python3 -c '
import json, sys
print(json.dumps({"answers": [json.load(sys.stdin)["choices"][0]["message"]["content"]]}))
' <<< "$second"
