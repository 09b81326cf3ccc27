"""The media that hold segments: one file a medium."""
