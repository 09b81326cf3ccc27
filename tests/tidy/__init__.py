"""The house rules that no linter knows: sizes, banned calls, owners, packaging."""
