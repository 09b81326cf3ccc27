"""kvharbor's shared language and client SDK: what an inference engine imports."""
