//! vhost-user server: control plane.
