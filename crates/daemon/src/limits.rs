//! Resource limits: each queue takes three descriptors, and the usual soft limit is 1024.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of descriptors to the hard limit. Nothing in the daemon uses `select`, the reason for the soft limit.
pub(crate) fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(errno) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(
            limit = limit.current,
            "cannot raise the limit of open descriptors, many queues may exceed it: {errno}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        raise_descriptors();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
