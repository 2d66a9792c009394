"""Reports: one form to store (JSON lines with header and footer), several to read."""
