"""What the embedded engine stores of the tokens that it has computed: a tree of nodes (`nodes`),
what layers keep for them (`stores`), both together (`cache`), and attention to it (`attention`)."""
