//! Normalization and comparison of iSCSI names, without regard to case (RFC 7143, 4.2.7; RFC 3722).
//!
//! A name has one normalized form, which is the key of targets, access lists, sessions, registrations and statistics. Two spellings of a
//! name are therefore the same initiator or target everywhere. Peers send names: length and work are bounded. Control path only.
#![forbid(unsafe_code)]

use std::borrow::Cow;

/// Maximum length of an iSCSI name in bytes (RFC 7143, 4.2.7.2).
pub const NAME_MAX: usize = 223;

/// Type designators: valid prefixes of a name.
const TYPES: [&str; 3] = ["iqn.", "eui.", "naa."];

/// Returns the normalized form of `name`; `None` if it is not an iSCSI name.
///
/// ASCII letters become lower case; other text is mapped, normalized and checked as in RFC 3722, which uses nameprep. In ASCII only white
/// space, control characters and the comma, which ends a name in a SCSI port name and in a TransportID, are rejected. RFC 3722 prohibits
/// more, for example `_`, but initiators with such names are in use.
pub fn normalised(name: &str) -> Option<Cow<'_, str>> {
    if name.len() > NAME_MAX {
        return None;
    }
    let form = if !name.is_ascii() {
        Cow::Owned(stringprep::nameprep(name).ok()?.into_owned())
    } else if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(name.to_ascii_lowercase())
    } else {
        Cow::Borrowed(name)
    };
    // Normalization may have turned full stops of other scripts into ASCII.
    let has_type = TYPES.iter().any(|designator| form.starts_with(designator));
    let is_allowed =
        |c: char| !c.is_control() && !c.is_whitespace() && !",\u{3001}\u{3002}".contains(c);
    (has_type && form.len() <= NAME_MAX && form.chars().all(is_allowed)).then_some(form)
}

/// Returns true if the name is a valid iSCSI name.
pub fn is_iscsi_name(name: &str) -> bool {
    normalised(name).is_some()
}

/// Returns true if both names are equal after normalization. Invalid names are compared byte by byte.
pub fn is_same(one: &str, other: &str) -> bool {
    match (normalised(one), normalised(other)) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn spellings_of_one_name_are_one_name() {
        for (one, other) in [
            ("iqn.2026-11.org.example:t0", "IQN.2026-11.ORG.Example:T0"),
            ("eui.02004567a425678d", "EUI.02004567A425678D"),
            ("naa.52004567ba64678d", "naa.52004567BA64678D"),
            // Table B.2 of RFC 3454: sharp s; KC: full width letters, ligatures; B.1: the soft hyphen is removed
            (
                "iqn.2026-11.org.example:stra\u{df}e",
                "iqn.2026-11.org.example:STRASSE",
            ),
            (
                "iqn.2026-11.org.example:\u{c4}",
                "iqn.2026-11.org.example:a\u{308}",
            ),
            (
                "iqn.2026-11.org.example:t0",
                "iqn.2026-11.org.example:\u{ff34}\u{ff10}",
            ),
            (
                "iqn.2026-11.org.example:t0",
                "iqn.2026-11.org.example:t\u{ad}0",
            ),
            (
                "iqn.2026-11.org.example:t0",
                "\u{ff29}\u{ff31}\u{ff2e}.2026-11.org.example:t0",
            ),
        ] {
            assert!(is_same(one, other), "{one} {other}");
        }
        assert_eq!(
            normalised("iqn.2026-11.org.example:STRA\u{df}E").as_deref(),
            Some("iqn.2026-11.org.example:strasse")
        );
        assert!(!is_same(
            "iqn.2026-11.org.example:t0",
            "iqn.2026-11.org.example:t1"
        ));
        assert!(!is_same("", "iqn.2026-11.org.example:t1") && is_same("moon", "moon"));
    }

    #[test]
    fn names_prohibited_by_rfc_3722_are_refused() {
        let long = format!("iqn.2026-11.org.example:{}", "a".repeat(NAME_MAX - 23));
        // Normalization doubles the length: each capital I with a dot above becomes two characters
        let grows = format!("iqn.{}", "\u{130}".repeat(109));
        for name in [
            "",
            "moon",
            "iqn",
            "iqn.2026-11.org.example:a b",
            "iqn.2026-11.org.example:a,b",
            "iqn.2026-11.org.example:a\0",
            "iqn.2026-11.org.example:a\u{7f}",
            "iqn.2026-11.org.example:a\u{a0}b",
            "iqn.2026-11.org.example:a\u{85}b",
            "iqn.2026-11.org.example:a\u{e000}",
            "iqn.2026-11.org.example:a\u{fffd}",
            "iqn.2026-11.org.example:a\u{3002}",
            // Right-to-left next to left-to-right text (RFC 3454, 6)
            "iqn.2026-11.org.example:\u{5d0}",
            &long,
            &grows,
        ] {
            assert_eq!(normalised(name), None, "{name:?}");
        }
        assert!(is_iscsi_name(&long[..NAME_MAX]));
        assert!(is_iscsi_name("iqn.2026-11.org.example:with_underscore"));
    }

    proptest! {
        #[test]
        fn normalising_twice_is_normalising_once(name in "(iqn|IQN|Eui|naa)[.].{0,80}") {
            if let Some(once) = normalised(&name) {
                let twice = normalised(&once);
                prop_assert_eq!(twice.as_deref(), Some(&*once));
                prop_assert!(is_same(&name, &once));
            }
        }

        #[test]
        fn ascii_case_never_counts(name in "iqn[.][!-+.-~]{0,80}") {
            prop_assert!(is_same(&name, &name.to_ascii_uppercase()), "{}", name);
        }
    }
}
