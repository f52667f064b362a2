//! Feeds arbitrary bytes as the stream of a logged-in initiator: framing, commands, write data, task management, text.
//!
//! The first two bytes select digests, the error recovery level and the size of the pieces.

use std::sync::Arc;

use iscsi::Limits;
use iscsi::login::{
    Admission, ChapUser, Refusal, SendTargets, TargetPolicy, TargetRecord, Visitor,
};
use iscsi::negotiation::Offer;
use iscsi::pdu::{Digests, LoginRequest, LoginStatus, TaskFunctionResponse, encode};
use iscsi::session::{Attachment, Claim, ConnectionKey, Leaving, Session, SessionTable};
use iscsi::target::{Completion, Connection, DetachedState, Step};
use iscsi::text::push_pair;

struct Open(SessionTable);

impl TargetPolicy for Open {
    fn admit(&self, _: &Visitor) -> Result<Admission, Refusal> {
        let mut offer = Offer {
            max_recv_data_segment_length: 4096,
            ..Offer::default()
        };
        offer.session.error_recovery_level = 2;
        Ok(Admission {
            chap: Vec::new(),
            must_authenticate: false,
            portal_group_tag: 1,
            target_alias: None,
            offer,
        })
    }

    fn chap_users(&self, _: &Visitor, _: &str) -> Vec<ChapUser> {
        Vec::new()
    }

    fn session(&self, tsih: u16) -> Option<Arc<Session>> {
        self.0.session(tsih)
    }

    fn attach(&self, _: &Visitor, claim: Claim) -> Result<Attachment, LoginStatus> {
        self.0.attach(claim)
    }

    fn detach(&self, connection: ConnectionKey, leaving: Leaving) -> Vec<ConnectionKey> {
        self.0.detach(connection, leaving)
    }

    fn targets(&self, _: &Visitor, _: SendTargets<'_>) -> Vec<TargetRecord> {
        let addresses = vec!["192.0.2.1:3260,1".to_owned()];
        vec![TargetRecord {
            name: "iqn.2026-11.org.example:t0".to_owned(),
            addresses,
        }]
    }

    fn random(&self, bytes: &mut [u8]) {
        bytes.fill(0x5a);
    }
}

fn login(digest: &str, level: &str) -> Vec<u8> {
    let mut request = LoginRequest::blank();
    request.opcode = 0x43;
    request.flags = 0x87;
    let mut text = Vec::new();
    for (key, value) in [
        ("InitiatorName", "iqn.2026-11.org.example:i0"),
        ("TargetName", "iqn.2026-11.org.example:t0"),
        ("InitialR2T", "No"),
        ("MaxOutstandingR2T", "4"),
        ("DataPDUInOrder", "No"),
        ("iSCSIProtocolLevel", "2"),
        ("DataDigest", digest),
        ("ErrorRecoveryLevel", level),
    ] {
        push_pair(&mut text, key, value);
    }
    let mut bytes = Vec::new();
    encode(&mut bytes, request.to_bhs(), &[], &text, Digests::default());
    bytes
}

/// Feeds bytes to a connection and answers every other command at once. Returns false if the connection must be dropped.
fn feed(connection: &mut Connection, mut input: &[u8]) -> bool {
    loop {
        let received = connection.receive(input);
        input = &input[received.used..];
        match received.step {
            Step::More => return true,
            Step::Close(_) => return false,
            Step::Data(_) if input.is_empty() => return true,
            Step::Data(placement) => {
                let expected = connection
                    .command(placement.task)
                    .map_or(0, |command| command.expected_length);
                assert!(
                    placement.offset <= expected && placement.length <= expected - placement.offset
                );
                let take = input.len().min(placement.length as usize);
                connection.data_stored(&input[..take]);
                input = &input[take..];
            }
            Step::Command(task) => {
                let command = connection.command(task).expect("the command of this step");
                if command.write {
                    let wanted = u32::from(command.cdb[8]) << 9;
                    if connection.solicit(task, wanted).expect("in progress") {
                        connection
                            .respond(task, &Completion::default())
                            .expect("in progress");
                    }
                } else if command.cdb[0] & 1 == 0 {
                    connection
                        .respond(task, &Completion::default())
                        .expect("in progress");
                }
            }
            Step::DataComplete(task) => connection
                .respond(task, &Completion::default())
                .expect("in progress"),
            Step::TaskManagement(function) => {
                if let Some(task) = function.referenced {
                    connection.abort(task).expect("in progress");
                }
                connection
                    .task_management_response(function.tag, TaskFunctionResponse::Complete)
                    .expect("asked for");
            }
            Step::Logout(logout) if logout.tag & 1 == 0 => {
                connection
                    .logout_response(logout.tag)
                    .expect("a logout in progress");
            }
            // No response: a logged-out connection drains without end.
            Step::Logout(_)
            | Step::LoggedIn(_)
            | Step::Abandoned(_)
            | Step::Wake(_)
            | Step::Forgotten(_) => {}
        }
    }
}

/// Feeds `data` to a connection.
pub fn run(data: &[u8]) {
    let [digest, cut, stream @ ..] = data else {
        return;
    };
    let policy = Arc::new(Open(SessionTable::new(4, 16)));
    let mut connection = Connection::new(policy, Visitor::default(), Limits::default());
    assert!(feed(
        &mut connection,
        &login(
            if digest & 1 == 0 { "None" } else { "CRC32C" },
            ["0", "1", "2", "2"][usize::from(digest >> 1 & 3)],
        )
    ));
    for piece in stream.chunks(usize::from(*cut).max(1)) {
        if !feed(&mut connection, piece) {
            break;
        }
        connection.outgoing().clear();
    }
    if connection.recovers() {
        let tasks: Vec<_> = connection.tasks().collect();
        for task in tasks {
            connection.detach_task(task, DetachedState::ToRestart).ok();
        }
    }
    let session = connection.session().cloned();
    connection.close();
    if let Some(session) = session {
        session.forget_reassignable(|_, _| true);
        assert!(session.reassignable.is_empty());
    }
}
