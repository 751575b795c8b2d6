"""`bench simulate`: policies over recorded texts, on this machine's costs or on another device's."""
