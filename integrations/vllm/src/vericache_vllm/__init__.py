"""VeriCache on vLLM: drafts from compressed KV, decided by a stock vLLM engine whose full KV lives in LMCache."""
