//! Parses arbitrary bytes as text keys: pairs, values of every type, and a negotiation with them.

use iscsi::negotiation::{Offer, Originator, Responder};
use iscsi::text::{KEY_MAX, parse, parse_binary, parse_list, parse_number, parse_range};

/// Parses and negotiates `data`.
pub fn run(data: &[u8]) {
    let Ok(pairs) = parse(data) else { return };
    let mut responder = Responder::new(Offer::default());
    let mut originator = Originator::new(Offer::default());
    for pair in pairs {
        assert!((1..=KEY_MAX).contains(&pair.key.len()));
        parse_number(pair.value);
        parse_list(pair.value);
        if let Some(range) = parse_range(pair.value) {
            assert!(range.low <= range.high);
        }
        if let Some(binary) = parse_binary(pair.value, 64) {
            assert!((1..=64).contains(&binary.len()));
        }
        // Refusals are allowed.
        originator.accept(pair).ok();
        responder.answer(pair);
        responder.answer_in_full_feature_phase(pair);
    }
    responder.finish();
    let session = &responder.session;
    assert!((512..1 << 24).contains(&session.max_burst_length));
    assert!(session.first_burst_length <= session.max_burst_length && session.max_connections >= 1);
    assert!((512..1 << 24).contains(&responder.connection.peer_max_recv));
}
