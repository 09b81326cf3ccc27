"""Results that the documents quote: one JSON file a benchmark, and what makes tables of them."""
