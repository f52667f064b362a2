//! `--net` of `lunette vm run`: a guest's network card and its back end.

use std::net::IpAddr;
use std::str::FromStr;

use anyhow::Result;
use sha2::{Digest, Sha256};
use vm::running::{Tap, TapOptions, card_properties};

/// Maximum queue pairs that a guest uses; QEMU allows more.
const QUEUES_MAX: u32 = 16;
/// The kernel's limit for an interface name, without its final NUL.
const NAME_MAX: usize = 15;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Net {
    None,
    /// QEMU's user network.
    User,
    /// A tap interface of this machine.
    Tap {
        options: TapOptions,
        mac: Option<String>,
        /// Address that the small system assigns to the card, with the prefix length of its network.
        address: Option<String>,
    },
}

impl FromStr for Net {
    type Err = String;

    fn from_str(text: &str) -> Result<Net, String> {
        let mut parts = text.split(',');
        match (parts.next(), text) {
            (_, "none") => return Ok(Net::None),
            (_, "user") => return Ok(Net::User),
            (Some("tap"), _) => {}
            _ => {
                return Err(
                    "allowed are none, user and tap, after which ,bridge=NAME ,vhost=on ,queues=N ,mac=ADDRESS and ,address=ADDRESS/LENGTH may follow; hint: --net tap,bridge=br0"
                        .to_owned(),
                );
            }
        }
        let mut options = TapOptions {
            bridge: None,
            vhost: false,
            queues: 1,
        };
        let (mut mac, mut address) = (None, None);
        for part in parts {
            match part.split_once('=') {
                Some(("bridge", name)) => options.bridge = Some(bridge(name)?),
                Some(("vhost", "on")) => options.vhost = true,
                Some(("vhost", "off")) => options.vhost = false,
                Some(("queues", number)) => options.queues = queues(number)?,
                Some(("mac", text)) => mac = Some(hardware_address(text)?),
                Some(("address", text)) => address = Some(network_address(text)?),
                _ => {
                    return Err(format!(
                        "{part:?} is unknown; allowed are bridge=NAME, vhost=on, vhost=off, queues=N, mac=ADDRESS and address=ADDRESS/LENGTH; hint: --net tap,bridge=br0,vhost=on"
                    ));
                }
            }
        }
        Ok(Net::Tap {
            options,
            mac,
            address,
        })
    }
}

impl Net {
    /// Creates the tap, if there is one. The text names options that could not be applied.
    ///
    /// # Errors
    /// Missing requirements.
    pub fn tap(&self) -> Result<(Option<Tap>, Option<String>)> {
        let Net::Tap { options, .. } = self else {
            return Ok((None, None));
        };
        let (tap, without) = Tap::make(options)?;
        Ok((Some(tap), without))
    }

    /// Word for the small system on the kernel's command line.
    pub fn kernel_word(&self) -> Option<String> {
        match self {
            Net::User => Some("lunette.net=user".to_owned()),
            Net::Tap {
                address: Some(address),
                ..
            } => Some(format!("lunette.net={address}")),
            Net::None | Net::Tap { .. } => None,
        }
    }

    /// QEMU's arguments. A tap card without an address gets `usual`: QEMU's own default is the same for all guests on a bridge.
    pub fn card(
        &self,
        tap: Option<&Tap>,
        mac: Option<&str>,
        usual: &str,
        place: &str,
    ) -> Vec<String> {
        let (netdev, queues) = match (self, tap) {
            (_, Some(tap)) => (tap.netdev("net"), tap.card_properties()),
            (Net::Tap { options, .. }, None) => {
                (named_tap(options), card_properties(options.queues as usize))
            }
            _ => ("user,id=net".to_owned(), String::new()),
        };
        let own = match self {
            Net::Tap { mac, .. } => Some(mac.as_deref().unwrap_or(usual)),
            _ => None,
        };
        let mac = mac.or(own);
        let mac = mac.map_or(String::new(), |mac| format!(",mac={mac}"));
        vec![
            "-netdev".to_owned(),
            netdev,
            "-device".to_owned(),
            format!("virtio-net-pci,id=net-card,netdev=net,romfile={mac}{queues}{place}"),
        ]
    }
}

/// Returns QEMU's `-netdev` for a tap that QEMU opens by its name. `lunette vm run` passes descriptors instead.
fn named_tap(options: &TapOptions) -> String {
    let mut text = "tap,id=net,ifname=tap0,script=no,downscript=no".to_owned();
    if options.queues > 1 {
        text.push_str(&format!(",queues={}", options.queues));
    }
    if options.vhost {
        text.push_str(",vhost=on");
    }
    text
}

/// Returns a hardware address that is stable and unique for a guest: QEMU's prefix, and a number derived from both texts.
pub fn usual_address(seed: &str, name: &str) -> String {
    let mut hash = Sha256::new();
    for part in [seed, name] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    let hash = hash.finalize();
    let bytes = hash.iter().take(3).map(|byte| format!(":{byte:02x}"));
    format!("52:54:00{}", bytes.collect::<String>())
}

fn bridge(name: &str) -> Result<String, String> {
    let is_name = !name.is_empty() && name.len() <= NAME_MAX && !name.contains(['/', '\0']);
    is_name.then(|| name.to_owned()).ok_or_else(|| {
        format!("bridge={name:?}: an interface's name has 1 to {NAME_MAX} bytes; hint: bridge=br0")
    })
}

fn queues(text: &str) -> Result<u32, String> {
    let number = text.parse().ok();
    let number = number.filter(|number| (1..=QUEUES_MAX).contains(number));
    number.ok_or_else(|| format!("queues={text:?}: allowed are 1 to {QUEUES_MAX}; hint: queues=2"))
}

fn network_address(text: &str) -> Result<String, String> {
    let split = text.split_once('/');
    let read = split.and_then(|(address, length)| {
        Some((address.parse::<IpAddr>().ok()?, length.parse::<u8>().ok()?))
    });
    let longest = |address: &IpAddr| if address.is_ipv4() { 32 } else { 128 };
    match read {
        Some((address, length)) if length <= longest(&address) => Ok(text.to_owned()),
        _ => Err(format!(
            "address={text:?}: expected an address and the length of its network's prefix; hint: address=10.9.0.2/24"
        )),
    }
}

/// Parses six hexadecimal bytes of a unicast address (IEEE 802, 8.2.2: the first byte's lowest bit is 0).
pub fn hardware_address(text: &str) -> Result<String, String> {
    let bytes: Vec<&str> = text.split(':').collect();
    let is_byte = |byte: &&str| byte.len() == 2 && byte.bytes().all(|b| b.is_ascii_hexdigit());
    let first = bytes
        .first()
        .and_then(|first| u8::from_str_radix(first, 16).ok());
    match bytes.len() == 6 && bytes.iter().all(is_byte) && first.is_some_and(|first| first & 1 == 0)
    {
        true => Ok(text.to_owned()),
        false => Err("expected six bytes such as 52:54:00:12:34:56, the first one even".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_addresses_have_six_bytes_and_mean_one_station() {
        assert!(hardware_address("52:54:00:12:34:56").is_ok());
        for wrong in [
            "",
            "52:54:00:12:34",
            "53:54:00:12:34:56",
            "52:54:00:12:34:5x",
            "52-54-00-12-34-56",
            "52:54:00:12:34:+6",
        ] {
            assert!(hardware_address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn guests_on_taps_have_addresses_of_their_own() {
        let card = |name: &str, text: &str, mac: Option<&str>| {
            let net: Net = text.parse().unwrap();
            net.card(None, mac, &usual_address("machine", name), "")
                .pop()
        };
        let (one, two) = (card("one", "tap", None), card("two", "tap", None));
        assert_ne!(one, two);
        assert_eq!(one, card("one", "tap", None));
        let named = card("one", "tap,mac=52:54:00:12:34:56", None).unwrap();
        assert!(named.contains("mac=52:54:00:12:34:56"), "{named}");
        assert!(hardware_address(&usual_address("", "a")).is_ok());
    }

    #[test]
    fn networks_are_read_with_all_their_options() {
        assert_eq!("none".parse(), Ok(Net::None));
        assert_eq!("user".parse(), Ok(Net::User));
        let text = "tap,bridge=br0,vhost=on,queues=4,mac=52:54:00:12:34:56,address=10.9.0.2/24";
        let wanted = Net::Tap {
            options: TapOptions {
                bridge: Some("br0".to_owned()),
                vhost: true,
                queues: 4,
            },
            mac: Some("52:54:00:12:34:56".to_owned()),
            address: Some("10.9.0.2/24".to_owned()),
        };
        assert_eq!(text.parse(), Ok(wanted.clone()));
        assert_eq!(
            wanted.kernel_word().as_deref(),
            Some("lunette.net=10.9.0.2/24")
        );
        for wrong in [
            "",
            "bridge",
            "user,queues=2",
            "tap,queues=0",
            "tap,queues=17",
            "tap,bridge=",
            "tap,bridge=a/b",
            "tap,vhost=maybe",
            "tap,address=10.9.0.2",
            "tap,address=10.9.0.2/33",
            "tap,speed=1",
        ] {
            let error = wrong.parse::<Net>().unwrap_err();
            assert!(error.contains("hint:"), "{wrong}: {error}");
        }
    }
}
