//! `GET /v1/events`: what changes, as it changes, as server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use ::control::Event;
use axum::extract::State;
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use tokio::sync::broadcast::error::RecvError;

use super::api::Api;

/// A comment as often as this tells a listener that the daemon is there, and us that the listener is.
const ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Stream events from now on. A listener that is too slow loses some, and gets their number: `event: missed`.
#[utoipa::path(get, path = "/v1/events", responses(
    (status = 200, description = "Events without end", body = Event, content_type = "text/event-stream"),
))]
pub(super) async fn listen(
    State(api): State<Api>,
) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
    let events = stream::unfold(api.events.subscribe(), |mut events| async {
        let told = match events.recv().await {
            Ok(event) => encode(&event),
            Err(RecvError::Lagged(missed)) => sse::Event::default()
                .event("missed")
                .data(missed.to_string()),
            Err(RecvError::Closed) => return None,
        };
        Some((Ok(told), events))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE_INTERVAL))
}

fn encode(event: &Event) -> sse::Event {
    let data = serde_json::to_string(event).unwrap_or_default();
    sse::Event::default()
        .id(event.id.to_string())
        .event(event.event.clone())
        .data(data)
}
