#!/bin/sh
echo "there is no such account" >&2
exit 1
