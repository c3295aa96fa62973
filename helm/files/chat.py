"""`helm test`: one question through the router's Service, over gRPC and over REST, as clients are told to ask it.

GRPC and HTTP are its addresses. If the router speaks TLS, TLS_DIR holds ca.crt. If it asks for a certificate,
CLIENT_DIR holds tls.crt and tls.key; if it asks for an API key, KEYS_FILE holds them. If that file holds hashes alone,
all that can be seen is that nobody gets in without.
"""

import json
import os
import ssl
import sys
import urllib.request

from baton.client.sync_client import Client
from common.errors import UnauthenticatedError

QUESTION = "What is the capital of Japan?"
options: dict[str, str] = {}
headers = {"Content-Type": "application/json"}
context = None

if folder := os.environ.get("TLS_DIR"):
    options["tls_ca"] = f"{folder}/ca.crt"
    context = ssl.create_default_context(cafile=options["tls_ca"])
    if folder := os.environ.get("CLIENT_DIR"):
        options |= {"tls_cert": f"{folder}/tls.crt", "tls_key": f"{folder}/tls.key"}
        context.load_cert_chain(options["tls_cert"], options["tls_key"])

if path := os.environ.get("KEYS_FILE"):
    try:
        with Client(os.environ["GRPC"], timeout=120, **options) as client:
            client.models()
        sys.exit("the router asks nobody for an API key")
    except UnauthenticatedError as error:
        print("without a key:", error)
    with open(path) as file:
        words = [line.partition("#")[0].split() for line in file]
    keys = [line[0] for line in words if line and not line[0].startswith("sha256:")]
    if not keys:
        sys.exit(0)
    options["api_key"] = keys[0]
    headers["Authorization"] = f"Bearer {keys[0]}"

with Client(os.environ["GRPC"], timeout=120, **options) as client:
    text = client.chat(QUESTION, temperature=0.0, max_tokens=16).result().text
print("gRPC:", text)
if not text.strip():
    sys.exit("an empty answer over gRPC")

body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16}
url = os.environ["HTTP"] + "/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
with urllib.request.urlopen(request, timeout=120, context=context) as reply:
    rest = json.load(reply)["choices"][0]["message"]["content"]
print("REST:", rest)
if rest != text:
    sys.exit("REST and gRPC answer differently")
