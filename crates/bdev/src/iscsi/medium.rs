//! A logical unit as what a disk's identity belongs to: its own designator, wherever it is reached.

use iscsi_initiator::{UnitAddress, UnitInfo};

use crate::network_medium::NetworkMedium;

/// The medium that a unit is.
pub(super) fn of(address: &UnitAddress, info: &UnitInfo) -> NetworkMedium {
    let key = match (&info.naa, &info.serial) {
        (Some(naa), _) => format!("iscsi:naa.{naa}"),
        // Serial numbers are unique for their vendor and product at best: a target's units may all have the same.
        (None, serial) => {
            let serial = serial.as_deref().unwrap_or_default();
            format!("iscsi:{}/{}/{serial}", address.target, address.lun)
        }
    };
    NetworkMedium::new(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Medium;

    #[test]
    fn a_unit_is_the_same_at_every_portal_if_it_has_a_designator() {
        let address = |text: &str| text.parse::<UnitAddress>().unwrap();
        let (one, other) = (
            address("iscsi://192.0.2.1/iqn.2026-11.org.example:a/0"),
            address("iscsi://192.0.2.2/iqn.2026-11.org.example:b/1"),
        );
        let named = UnitInfo {
            naa: Some("3a5b000000000001".to_owned()),
            ..UnitInfo::default()
        };
        let identity = |address: &UnitAddress, info: &UnitInfo| of(address, info).own_identity();
        assert_eq!(identity(&one, &named), identity(&other, &named));
        let unnamed = UnitInfo::default();
        assert_ne!(identity(&one, &unnamed), identity(&other, &unnamed));
        assert_ne!(identity(&one, &unnamed), identity(&one, &named));
    }
}
