//! Access control: portals, networks, access control lists and demo mode.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// A network portal of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portal {
    /// Address and TCP port; port 0 lets the kernel choose.
    pub address: SocketAddr,
    /// Target portal group tag.
    pub group: u16,
}

impl std::fmt::Display for Portal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{},{}", self.address, self.group)
    }
}

/// The registered TCP port of iSCSI targets.
const PORT: u16 = 3260;

impl FromStr for Portal {
    type Err = String;

    /// Parses `ADDRESS`, `ADDRESS:PORT` or `[ADDRESS]:PORT`, then an optional `,GROUP`.
    fn from_str(text: &str) -> Result<Portal, String> {
        let (address, group) = match text.rsplit_once(',') {
            None => (text, 1),
            Some((address, group)) => {
                let group = group
                    .parse()
                    .map_err(|_| format!("portal group {group:?} is not a number below 65536"))?;
                (address, group)
            }
        };
        let plain = address.trim_start_matches('[').trim_end_matches(']');
        let address = address
            .parse::<SocketAddr>()
            .or_else(|_| plain.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, PORT)))
            .map_err(|_| {
                let hint = match address.trim_start_matches(':').parse::<u16>() {
                    Ok(port) => format!("; hint: 0.0.0.0:{port} for all addresses of this host"),
                    Err(_) => String::new(),
                };
                format!("{address:?} is not an address such as 127.0.0.1:3260 or [::1]{hint}")
            })?;
        Ok(Portal { address, group })
    }
}

/// An announced address of a portal group, if initiators cannot use the portal's own address: behind address translation, or for a DNS
/// name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announced {
    /// TargetAddress value without the portal group tag (RFC 7143, 13.8): `address:port`, `[address]:port` or `name:port`.
    pub address: String,
    /// Target portal group tag.
    pub group: u16,
}

impl std::fmt::Display for Announced {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{},{}", self.address, self.group)
    }
}

impl FromStr for Announced {
    type Err = String;

    /// Parses the syntax of a portal, or a DNS name in place of the address.
    fn from_str(text: &str) -> Result<Announced, String> {
        if let Ok(Portal { address, group }) = text.parse::<Portal>() {
            let is_scoped = matches!(address, SocketAddr::V6(ip) if ip.scope_id() != 0);
            if address.ip().is_unspecified() || address.port() == 0 || is_scoped {
                return Err(format!(
                    "{text:?} is not an address that initiators can reach"
                ));
            }
            let address = address.to_string();
            return Ok(Announced { address, group });
        }
        let wrong = || {
            format!(
                "{text:?} is not an address such as 203.0.113.7:3260, [2001:db8::7]:3260,2 or san.example.org:3260"
            )
        };
        let (endpoint, group) = match text.rsplit_once(',') {
            None => (text, 1),
            Some((endpoint, group)) => (endpoint, group.parse().map_err(|_| wrong())?),
        };
        let (name, port) = match endpoint.rsplit_once(':') {
            None => (endpoint, PORT),
            Some((name, port)) => (name, port.parse().map_err(|_| wrong())?),
        };
        let is_label = |label: &str| {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            (1..=63).contains(&label.len()) && label.bytes().all(allowed)
        };
        // A name with a numeric last label is an invalid address.
        let last = name.rsplit('.').next().unwrap_or_default();
        let is_number = last.bytes().all(|byte| byte.is_ascii_digit());
        if port == 0 || name.len() > 253 || is_number || !name.split('.').all(is_label) {
            return Err(wrong());
        }
        Ok(Announced {
            address: format!("{name}:{port}"),
            group,
        })
    }
}

/// Addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl FromStr for Network {
    type Err = String;

    /// Parses `ADDRESS` or `ADDRESS/PREFIX`.
    fn from_str(text: &str) -> Result<Network, String> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let wrong = || format!("{text:?} is not an address or network such as 192.0.2.0/24");
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => bits,
            Some(prefix) => prefix.parse().map_err(|_| wrong())?,
        };
        if prefix > bits {
            return Err(wrong());
        }
        Ok(Network { address, prefix })
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl Network {
    /// Returns true if the network contains the address. IPv4-mapped IPv6 addresses count as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(ours), IpAddr::V4(theirs)) => {
                let shift = 32 - u32::from(self.prefix);
                let high = |ip: std::net::Ipv4Addr| u64::from(ip.to_bits()) >> shift;
                high(ours) == high(theirs)
            }
            (IpAddr::V6(ours), IpAddr::V6(theirs)) => {
                let shift = 128 - u32::from(self.prefix);
                let high = |ip: std::net::Ipv6Addr| ip.to_bits().checked_shr(shift).unwrap_or(0);
                high(ours) == high(theirs)
            }
            _ => false,
        }
    }
}

/// An entry of the access control list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AclEntry {
    /// Initiator name; `None`: any.
    pub initiator: Option<String>,
    /// Source network; `None`: any.
    pub network: Option<Network>,
    /// Writes are refused.
    pub read_only: bool,
}

impl AclEntry {
    /// Returns true if the entry is for this initiator at this address.
    pub fn matches(&self, initiator: &str, address: IpAddr) -> bool {
        let named = self.initiator.as_deref();
        let name = named.is_none_or(|name| iscsi_name::is_same(name, initiator));
        name && self.network.is_none_or(|network| network.contains(address))
    }
}

/// Access of initiators that are not in the access control list, if the target has no CHAP users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DemoMode {
    /// No access.
    #[default]
    None,
    /// Read access for all initiators.
    ReadOnly,
    /// Read and write access for all initiators.
    ReadWrite,
}

impl std::fmt::Display for DemoMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DemoMode::None => "none",
            DemoMode::ReadOnly => "ro",
            DemoMode::ReadWrite => "rw",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portals_have_a_port_and_a_group() {
        let portal = |text: &str| {
            let portal: Portal = text.parse().unwrap();
            (portal.address.to_string(), portal.group)
        };
        assert_eq!(portal("192.0.2.1"), ("192.0.2.1:3260".into(), 1));
        assert_eq!(portal("192.0.2.1:0,7"), ("192.0.2.1:0".into(), 7));
        assert_eq!(portal("[::1]"), ("[::1]:3260".into(), 1));
        assert_eq!(portal("[::1]:9,2"), ("[::1]:9".into(), 2));
        assert!("moon".parse::<Portal>().is_err());
        assert!("192.0.2.1,x".parse::<Portal>().is_err());
    }

    #[test]
    fn announced_addresses_have_a_port_and_a_group() {
        for (text, expected) in [
            ("203.0.113.7", "203.0.113.7:3260,1"),
            ("203.0.113.7:13260,2", "203.0.113.7:13260,2"),
            ("[2001:db8::7]:3260", "[2001:db8::7]:3260,1"),
            ("2001:db8::7", "[2001:db8::7]:3260,1"),
            ("san.example.org", "san.example.org:3260,1"),
            ("san-1:3261,4", "san-1:3261,4"),
        ] {
            let announced: Announced = text.parse().unwrap();
            assert_eq!(announced.to_string(), expected);
            assert_eq!(expected.parse(), Ok(announced));
        }
        for text in [
            "",
            ":3260",
            "0.0.0.0:3260",
            "[::]:3260",
            "203.0.113.7:0",
            "203.0.113.700",
            "a b:1",
            "a:b",
            "a..b",
            "a,x",
            "a:1,65536",
            "[fe80::1%2]:3260",
            "iqn.2026-11.org.example:t0",
            "a\0b",
        ] {
            assert!(text.parse::<Announced>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn networks_contain_addresses_with_their_prefix() {
        let network = |text: &str| text.parse::<Network>().unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(network("192.0.2.0/24").contains(ip("192.0.2.200")));
        assert!(network("192.0.2.0/24").contains(ip("::ffff:192.0.2.1")));
        assert!(!network("192.0.2.0/24").contains(ip("192.0.3.1")));
        assert!(network("0.0.0.0/0").contains(ip("203.0.113.9")));
        assert!(!network("0.0.0.0/0").contains(ip("2001:db8::1")));
        assert!(network("::/0").contains(ip("2001:db8::1")));
        assert!(network("2001:db8::/32").contains(ip("2001:db8:1::1")));
        assert!(!network("2001:db8::1").contains(ip("2001:db8::2")));
        assert!("192.0.2.0/33".parse::<Network>().is_err());
    }
}
