"""Other systems, set up as their documents advise: what our figures stand beside."""
