"""Data sets that build themselves: each module writes finished WebDataset shards into one folder."""
