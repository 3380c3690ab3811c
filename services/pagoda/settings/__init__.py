"""Where an option's value comes from: flag, environment, file or default, and which one won."""
