"""What each `pagoda <command>` does; `cli` finds them here, and nothing else imports them."""
