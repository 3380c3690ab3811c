"""The commands of `pagoda`, one module each; `cli` finds them here, and nothing else imports them."""
