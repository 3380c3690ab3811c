"""Starting, watching, restarting and ending the processes of one machine."""
