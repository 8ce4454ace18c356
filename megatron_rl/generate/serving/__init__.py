"""HTTP of replicas and servers: admission of clients, connections, errors."""
