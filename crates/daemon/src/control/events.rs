//! Server-sent events. `GET /v1/events`: changes. `GET /v1/live`: also status and counters every second.

use std::convert::Infallible;
use std::time::Duration;

use ::control::statistics::Statistics;
use ::control::{Event, Status};
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, Query, State};
use axum::response::sse::{self, KeepAlive, Sse};
use futures_util::stream::{self, Stream};
use latency::QueueSnapshot;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Interval, MissedTickBehavior, interval};
use utoipa::{IntoParams, ToSchema};

use super::ErrorResponse;
use super::access::Peer;
use super::api::Api;
use super::error_responses::{NameErrors, ReadErrors};
use super::status::status_for;

/// Interval of keep-alive comments. They detect a dead peer on both sides.
const ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Stream events from now on. A slow subscriber loses some and receives their number: `event: missed`.
#[utoipa::path(get, path = "/v1/events", operation_id = "stream_events", responses(
    (status = 200, description = "Unlimited stream of events", body = Event, content_type = "text/event-stream"),
))]
pub(super) async fn listen(
    State(api): State<Api>,
) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
    let events = stream::unfold(api.events.subscribe(), |mut events| async {
        let event = next(&mut events).await?;
        Some((Ok(event), events))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE_INTERVAL))
}

/// Returns the next event; `None` at the end of the daemon.
async fn next(events: &mut Receiver<Event>) -> Option<sse::Event> {
    match events.recv().await {
        Ok(event) => Some(encode(&event)),
        Err(RecvError::Lagged(missed)) => {
            let event = sse::Event::default().event("missed");
            Some(event.data(missed.to_string()))
        }
        Err(RecvError::Closed) => None,
    }
}

fn encode(event: &Event) -> sse::Event {
    let data = serde_json::to_string(event).unwrap_or_default();
    sse::Event::default()
        .id(event.id.to_string())
        .event(event.event.clone())
        .data(data)
}

/// Interval of status and counters. A slow subscriber receives them less often.
const MOMENT_INTERVAL: Duration = Duration::from_secs(1);

/// Options of the stream.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LiveOptions {
    /// Leave out the distributions of single stages. Their counts, sums and maxima stay, and the distribution of the total.
    #[serde(default)]
    #[param(required = false)]
    brief: bool,
}

/// Stream `moment` each second, with the responses of `/v1/status` and `/v1/statistics`, and in between the events of `/v1/events`.
#[utoipa::path(get, path = "/v1/live", operation_id = "stream_statistics", params(LiveOptions), responses(
    (status = 200, description = "Unlimited stream of snapshots and events", body = Moment, content_type = "text/event-stream"),
    NameErrors, ReadErrors,
))]
pub(super) async fn live(
    State(api): State<Api>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    options: Result<Query<LiveOptions>, QueryRejection>,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, ErrorResponse> {
    let options = options.map_err(|error| ErrorResponse::bad_request(error.body_text()))?;
    let brief = options.brief;
    let mut moments = interval(MOMENT_INTERVAL);
    moments.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let listener = (api.events.subscribe(), moments, api, peer);
    let live = stream::unfold(
        listener,
        move |(mut events, mut moments, api, peer)| async move {
            let event = next_of(&mut events, &mut moments, &api, &peer, brief).await?;
            Some((Ok(event), (events, moments, api, peer)))
        },
    );
    Ok(Sse::new(live))
}

async fn next_of(
    events: &mut Receiver<Event>,
    moments: &mut Interval,
    api: &Api,
    peer: &Peer,
    brief: bool,
) -> Option<sse::Event> {
    tokio::select! {
        event = next(events) => event,
        _ = moments.tick() => moment(api, peer, brief).await.ok(),
    }
}

/// State and counters of the daemon at one moment.
#[derive(Serialize, ToSchema)]
struct Moment {
    /// Response of `GET /v1/status`.
    status: Status,
    /// Response of `GET /v1/statistics`.
    statistics: Statistics,
}

async fn moment(api: &Api, peer: &Peer, brief: bool) -> Result<sse::Event, ErrorResponse> {
    let (status, mut statistics) = status_for(api, peer).await?;
    if brief {
        let queues = &mut statistics.latency.queues;
        queues.iter_mut().for_each(QueueSnapshot::shorten);
    }
    let data = serde_json::to_string(&Moment { status, statistics }).unwrap_or_default();
    Ok(sse::Event::default().event("moment").data(data))
}
