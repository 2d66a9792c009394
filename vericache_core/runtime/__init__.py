"""The runtime: request, draft, verify, commit. One idea a file; no file here names a compressor."""
