//! Asymmetric access: the access state of a session's target port for a unit (SPC-5, 5.16 and 6.36).
//!
//! Pure functions. Pages come from the unit and may be short or wrong.

use crate::unit_identity::designators;

/// Access state of a target port group; a smaller value is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AccessState {
    /// Active/optimized, or the unit has no asymmetric access.
    Optimized,
    NonOptimized,
    /// Standby, unavailable, offline, or in transition.
    None,
}

/// The port's state, and the best state of any other group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub own: AccessState,
    pub best: AccessState,
}

impl Access {
    /// For a unit without asymmetric access, or without a report.
    pub const EQUAL: Access = Access {
        own: AccessState::Optimized,
        best: AccessState::Optimized,
    };

    pub fn prefers_another_port(self) -> bool {
        self.best < self.own
    }
}

/// Returns true if standard INQUIRY data reports asymmetric access (TPGS).
pub(crate) fn ports_differ(inquiry: &[u8]) -> bool {
    inquiry.get(5).is_some_and(|byte| byte & 0x30 != 0)
}

/// Returns the target port group from the designators of VPD page 83h.
pub(crate) fn port_group(page: &[u8]) -> Option<u16> {
    designators(page).find_map(|one| match (one.association, one.kind, one.bytes) {
        (1, 5, [_, _, high, low]) => Some(u16::from_be_bytes([*high, *low])),
        _ => None,
    })
}

/// Parses REPORT TARGET PORT GROUPS data for a port of this group.
pub(crate) fn access(data: &[u8], group: u16) -> Option<Access> {
    let mut rest = data.get(4..)?;
    let (mut own, mut best) = (None, AccessState::None);
    while let Some((head, after)) = rest.split_first_chunk::<8>() {
        let state = match head[0] & 0x0f {
            0 => AccessState::Optimized,
            1 => AccessState::NonOptimized,
            _ => AccessState::None,
        };
        best = best.min(state);
        if u16::from_be_bytes([head[2], head[3]]) == group {
            own = Some(state);
        }
        rest = after.get(4 * usize::from(head[7])..)?;
    }
    own.map(|own| Access { own, best })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two groups with one port each, as in SPC-5, table 312.
    fn groups(first: u8, second: u8) -> Vec<u8> {
        let mut data = vec![0, 0, 0, 24];
        data.extend([first, 0x8f, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]);
        data.extend([second, 0x8f, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2]);
        data
    }

    #[test]
    fn own_state_and_the_best_one_are_found() {
        let of = |first, second, group| access(&groups(first, second), group);
        assert_eq!(of(0, 1, 1), Some(Access::EQUAL));
        assert!(of(0, 1, 2).unwrap().prefers_another_port());
        assert!(!of(1, 1, 2).unwrap().prefers_another_port());
        assert!(of(0x82, 1, 1).unwrap().prefers_another_port());
        assert!(!of(3, 2, 1).unwrap().prefers_another_port());
        assert_eq!(of(0, 0, 3), None);
        for cut in 0..28 {
            access(&groups(0, 0)[..cut], 2);
        }
    }

    #[test]
    fn group_of_a_port_is_found_behind_other_designators() {
        let mut page = vec![0, 0x83, 0, 0];
        page.extend([0x01, 0x03, 0, 8, 0x3a, 0x5b, 0, 0, 0, 0, 0, 1]);
        page.extend([0x01, 0x94, 0, 4, 0, 0, 0, 7]);
        page.extend([0x01, 0x95, 0, 4, 0, 0, 0x01, 0x02]);
        assert_eq!(port_group(&page), Some(0x0102));
        for cut in 0..page.len() {
            port_group(&page[..cut]);
        }
        assert!(ports_differ(&[0, 0, 0, 0, 0, 0x10]) && !ports_differ(&[0; 36]));
    }
}
