//! Targets that are silent, close the connection, or send wrong or meaningless data: each causes an error in time.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use iscsi_initiator::{Portal, Session, SessionError, SessionOptions, discover};

const TIMEOUT: Duration = Duration::from_millis(300);

/// Starts a target that calls `act` for each connection.
fn target(act: impl Fn(TcpStream) + Send + 'static) -> Portal {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let portal = listener.local_addr().expect("its address").to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            act(stream);
        }
    });
    portal.parse().expect("an address")
}

fn login(portal: &Portal) -> Result<Session, SessionError> {
    let options = SessionOptions {
        timeout: TIMEOUT,
        ..SessionOptions::default()
    };
    Session::login(portal, "iqn.2026-11.org.example:t0", &options)
}

/// Builds a Login Response header; `change` modifies it.
fn response(change: impl FnOnce(&mut [u8; 48])) -> [u8; 48] {
    let mut header = [0; 48];
    // Login Response, transit from operational negotiation to the full feature phase (RFC 7143, 11.13).
    (header[0], header[1]) = (0x23, 0x87);
    change(&mut header);
    header
}

#[test]
fn silent_target_times_out() {
    let portal = target(std::mem::forget);
    let begun = Instant::now();
    let error = login(&portal).err().expect("no session");
    assert!(matches!(error, SessionError::Silent { .. }), "{error}");
    assert!(begun.elapsed() >= TIMEOUT);
    let error = discover(
        &portal,
        &SessionOptions {
            timeout: TIMEOUT,
            ..SessionOptions::default()
        },
    );
    assert!(matches!(error, Err(SessionError::Silent { .. })));
}

#[test]
fn trickling_target_times_out() {
    let portal = target(|mut stream| {
        std::thread::spawn(move || {
            let answer = response(|header| header[7] = 200);
            for byte in answer.iter().chain(std::iter::repeat_n(&0, 200)) {
                std::thread::sleep(Duration::from_millis(50));
                if stream.write_all(&[*byte]).is_err() {
                    return;
                }
            }
        });
    });
    let begun = Instant::now();
    let error = login(&portal).err().expect("no session");
    assert!(matches!(error, SessionError::Silent { .. }), "{error}");
    // The target's response would take twelve seconds.
    assert!(begun.elapsed() < Duration::from_secs(8));
}

#[test]
fn target_that_closes_at_any_byte_is_reported() {
    for bytes in [0, 1, 47, 48, 60] {
        let portal = target(move |mut stream| {
            let mut request = [0; 48];
            stream.read_exact(&mut request).ok();
            let mut answer = response(|_| ()).to_vec();
            answer.resize(64, 0);
            // Half a response, or one that leaves the login incomplete.
            answer[1] = 0x04;
            answer[7] = 12;
            stream.write_all(&answer[..bytes]).ok();
        });
        let error = login(&portal).err().expect("no session").to_string();
        assert!(
            error.contains("lost") || error.contains("cannot log in"),
            "{bytes}: {error}"
        );
    }
}

#[test]
fn portal_without_a_listener_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let portal: Portal = listener
        .local_addr()
        .expect("its address")
        .to_string()
        .parse()
        .expect("one");
    drop(listener);
    let error = login(&portal).err().expect("no session").to_string();
    assert!(
        error.contains(&format!("cannot connect to {portal}"))
            && error.ends_with("hint: check that the iSCSI target runs and listens there"),
        "{error}"
    );
}

#[test]
fn invalid_answers_and_endless_redirections_are_errors() {
    let answers: [Vec<u8>; 6] = [
        vec![0xff; 4096],
        vec![0; 4096],
        // A data segment of 16 MiB in the login.
        response(|header| header[5..8].fill(0xff)).to_vec(),
        // Another opcode.
        response(|header| header[0] = 0x25).to_vec(),
        // Another initiator task tag.
        response(|header| header[16..20].fill(0xee)).to_vec(),
        // Status 0101h (target moved temporarily) without TargetAddress.
        response(|header| (header[36], header[37]) = (1, 1)).to_vec(),
    ];
    for answer in answers {
        let shown = format!("{:x?}", &answer[..8]);
        let portal = target(move |mut stream| {
            let mut request = [0; 48];
            stream.read_exact(&mut request).ok();
            stream.write_all(&answer).ok();
            // Waits until the initiator has closed the connection.
            stream.read_to_end(&mut Vec::new()).ok();
        });
        let begun = Instant::now();
        let error = login(&portal).err().expect("no session");
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{shown}: {error}"
        );
        assert!(
            matches!(
                error,
                SessionError::Login { .. } | SessionError::Lost { .. }
            ),
            "{shown}: {error}"
        );
    }
}
