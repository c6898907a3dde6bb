"""What a trained model knows, as numbers beside chance and as one picture.

Every module here is pure: feature tensors and names in, results out. Reading run folders and shards happens elsewhere.
"""
