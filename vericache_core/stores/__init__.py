"""Prefix stores: where the KV of prompts outlives the request that computed it."""
