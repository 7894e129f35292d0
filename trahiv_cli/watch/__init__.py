"""A page that shows a run, served on the viewer's own machine."""
