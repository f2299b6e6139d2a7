"""What is learned from: token data sets, their packing into batches, prompt files."""
