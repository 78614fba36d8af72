"""An agent of the standard library alone: reads a question on standard input, asks OPENAI_BASE_URL, prints the answer."""

from __future__ import annotations

import json
import os
import sys
import urllib.request

CALL_LIMIT_S = 180.0


def main() -> None:
    asked = json.load(sys.stdin)
    body = {"model": "policy", "messages": [{"role": "user", "content": asked["question"]}], **asked["sampling"]}
    base_url = os.environ["OPENAI_BASE_URL"]
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    proxies = urllib.request.ProxyHandler({} if "//127.0.0.1" in base_url else None)
    with urllib.request.build_opener(proxies).open(request, timeout=CALL_LIMIT_S) as reply:
        sys.stdout.write(json.load(reply)["choices"][0]["message"]["content"] or "")


if __name__ == "__main__":
    main()
