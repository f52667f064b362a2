//! Keys for mode, owner and group of a vhost-user socket.

use serde_json::json;

use super::accounts::{group_id, user_id};
use super::export_keys::ExportKey;
use super::key::{Kind, NONE, RunTime};
use super::setting::key;

const MODE_ALLOWED: &str = "an octal mode from \"0000\" to \"0777\", such as \"0660\"";
const USER: Kind = Kind::Checked(
    "user",
    "the name of a user in /etc/passwd, or a number",
    |user| match user_id(user) {
        Some(_) => Ok(()),
        None => Err(format!("/etc/passwd has no user `{user}`")),
    },
);
const GROUP: Kind = Kind::Checked(
    "group",
    "the name of a group in /etc/group, or a number",
    |group| match group_id(group) {
        Some(_) => Ok(()),
        None => Err(format!("/etc/group has no group `{group}`")),
    },
);

/// Key for the permission bits of the socket.
pub const SOCKET_MODE: ExportKey = key! {
    "socket_mode": Kind::Text("octal mode in quotes", MODE_ALLOWED); "`0777` less the umask"; RunTime::RELOAD;
    "permission bits of the socket, from its creation on. To connect, a front end needs the right to write";
    read |key, reader, export| export.rights.mode = key.parsed(reader, parse_mode).map(|at| at.value);
    get |export| Some(json!(format!("{:04o}", export.rights.mode?)))
};

/// Key for the owner of the socket.
pub const SOCKET_OWNER: ExportKey = key! {
    "socket_owner": USER; NONE; RunTime::RELOAD;
    "owner of the socket: a name of `/etc/passwd`, or a number. The daemon needs CAP_CHOWN for another user than its own";
    both rights.owner
};

/// Key for the group of the socket.
pub const SOCKET_GROUP: ExportKey = key! {
    "socket_group": GROUP; NONE; RunTime::RELOAD;
    "group of the socket: a name of `/etc/group`, or a number. The daemon must be a member of it, or needs CAP_CHOWN";
    both rights.group
};

/// Parses an octal mode.
fn parse_mode(text: &str) -> Result<u16, String> {
    let is_octal = matches!(text.len(), 3 | 4) && !text.starts_with('+');
    let mode = u16::from_str_radix(text, 8).ok();
    let mode = mode.filter(|mode| is_octal && *mode <= 0o777);
    mode.ok_or_else(String::new)
}

#[cfg(test)]
mod tests {
    use super::super::{Flags, Surroundings, Transport, parse, render};

    fn read(option: &str) -> Result<super::super::Config, String> {
        let flags = Flags {
            disk: vec!["d=ram:1M".to_owned()],
            vhost_blk: vec![format!("d:/run/d.sock{option}")],
            ..Flags::default()
        };
        let read = parse(None, &flags, &Surroundings::of_this_process());
        read.map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn rights_are_read_and_rendered_and_mistakes_name_the_key() {
        let config = read(",socket_mode=0660,socket_owner=root,socket_group=0").unwrap();
        let rights = &config
            .exports_over(Transport::VhostBlk)
            .next()
            .unwrap()
            .rights;
        assert_eq!(rights.mode, Some(0o660));
        assert_eq!(rights.owner.as_deref(), Some("root"));
        assert_eq!(rights.group.as_deref(), Some("0"));
        let text = render(&config);
        for line in [
            "socket_mode = \"0660\"",
            "socket_owner = \"root\"",
            "socket_group = \"0\"",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(
            read("")
                .unwrap()
                .exports_over(Transport::VhostBlk)
                .next()
                .unwrap()
                .rights
                .is_default()
        );
        for (option, named) in [
            (",socket_mode=0680", "socket_mode"),
            (",socket_mode=1777", "socket_mode"),
            (",socket_mode=66", "socket_mode"),
            (",socket_mode=rw", "socket_mode"),
            (",socket_owner=no-such-user", "no user `no-such-user`"),
            (",socket_group=no-such-group", "no group `no-such-group`"),
        ] {
            let error = read(option).unwrap_err();
            assert!(error.contains(named), "{option}: {error}");
        }
    }

    #[test]
    fn removed_rights_need_a_new_socket() {
        let with = read(",socket_mode=0660").unwrap();
        let other = read(",socket_mode=0600,socket_group=0").unwrap();
        let without = read("").unwrap();
        let [with, other, without] = [&with, &other, &without].map(|c| c.export("d").unwrap());
        assert!(with.can_become(other) && without.can_become(with));
        assert!(!with.can_become(without) && !with.is_same_endpoint(other));
    }
}
