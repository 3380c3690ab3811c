"""What models that read are asked, and which models those are."""
