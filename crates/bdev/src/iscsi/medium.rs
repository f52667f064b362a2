//! The medium of a unit's identity: its designator, at every portal.

use iscsi_initiator::{UnitAddress, UnitInfo};

use crate::network_medium::NetworkMedium;

/// Returns the medium of a unit. A locally assigned identifier is unique only within its target: two tgt hosts have units with the same
/// one. Serial numbers are at best unique per vendor and product: all units of a target may share one.
pub(super) fn of(address: &UnitAddress, info: &UnitInfo) -> NetworkMedium {
    let (identity, target) = (&info.identity, address.target.to_ascii_lowercase());
    let key = match (identity.world_wide_name(), identity.local_name()) {
        (Some(name), _) => format!("iscsi:{name}"),
        (None, Some(name)) => format!("iscsi:{target}/{name}"),
        (None, None) => {
            let serial = info.serial.as_deref().unwrap_or_default();
            format!("iscsi:{target}/{}/{serial}", address.lun)
        }
    };
    NetworkMedium::new(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Medium;

    fn named(naa: [u8; 8]) -> UnitInfo {
        let page = [&[0, 0x83, 0, 12, 1, 3, 0, 8][..], &naa].concat();
        let mut unit = UnitInfo::default();
        let mut ask = |_: &'static str, cdb: &[u8], _: u32| {
            Ok(match cdb[..3] {
                [0x12, 1, 0] => vec![0, 0, 0, 2, 0, 0x83],
                [0x12, 1, 0x83] => page.clone(),
                _ => vec![0; 36],
            })
        };
        unit.take_identity(&mut ask).unwrap();
        unit
    }

    fn addresses() -> [UnitAddress; 3] {
        [
            "iscsi://192.0.2.1/iqn.2026-11.org.example:a/0",
            "iscsi://192.0.2.2/iqn.2026-11.org.example:A/0",
            "iscsi://192.0.2.2/iqn.2026-11.org.example:b/1",
        ]
        .map(|text| text.parse().unwrap())
    }

    fn identity(address: &UnitAddress, info: &UnitInfo) -> Option<block::Identity> {
        of(address, info).own_identity()
    }

    #[test]
    fn world_wide_name_identifies_a_unit_at_every_portal() {
        let [one, _, other] = addresses();
        let unit = named([0x50, 0x01, 0x40, 0x5a, 0, 0, 0, 1]);
        assert_eq!(identity(&one, &unit), identity(&other, &unit));
        let unnamed = UnitInfo::default();
        assert_ne!(identity(&one, &unnamed), identity(&other, &unnamed));
        assert_ne!(identity(&one, &unnamed), identity(&one, &unit));
    }

    #[test]
    fn local_name_does_not_identify_units_across_targets() {
        let [one, same, other] = addresses();
        let unit = named([0x30, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!(identity(&one, &unit), identity(&same, &unit));
        assert_ne!(identity(&one, &unit), identity(&other, &unit));
    }
}
