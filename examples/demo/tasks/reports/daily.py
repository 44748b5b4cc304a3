#!/usr/bin/env python3
"""Reads its payload, and says what it would do."""
import json
import sys

payload = json.load(sys.stdin)["payload"]
print(f"report {payload['name']!r}: {sum(payload.get('figures', []))} in all")
