"""The operations of a model, declared once, and the back ends that implement them."""
