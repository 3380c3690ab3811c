"""A job from what was asked to its last update, whatever API asked. No HTTP needed."""
