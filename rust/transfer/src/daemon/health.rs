//! What is answered over HTTP: metrics, and whether this daemon lives, takes on work, and does well.
//!
//! ```text
//! /health/live    this process answers and its engine runs. If not: start it again.
//! /health/ready   the engine answers, connections are accepted, nothing is being drained. If not: send it nothing new.
//! /health/deep    also: every medium does well, and the conductor is connected, if there is one. If not: have a look.
//! ```

use std::time::{Duration, Instant};

use serde::Serialize;

use super::Shared;
use crate::admin::Status;
use crate::error::Error;
use crate::http::{Request, Response};
use crate::metrics;

/// An engine that takes longer to answer than this is not ready: a hundred times what it takes when all is well, a third
/// of what Kubernetes waits if told to wait 3 s.
const WITHIN: Duration = Duration::from_secs(1);

#[derive(Serialize)]
struct Body<'a> {
    node: &'a str,
    incarnation: u64,
    ok: bool,
    checks: Vec<Check>,
}

/// One thing that was looked at.
#[derive(Serialize)]
struct Check {
    check: String,
    ok: bool,
    /// What was found; if it is not ok, why not.
    detail: String,
}

impl Check {
    fn new(check: impl Into<String>, ok: bool, detail: impl Into<String>) -> Self {
        Self { check: check.into(), ok, detail: detail.into() }
    }
}

///
/// key: what whoever asks must show; without it he learns whether the daemon lives and is ready, and no name.
pub(super) fn answer(shared: &Shared, key: Option<&str>, request: &Request<'_>) -> Response {
    let known = |key: &str| request.bearer.is_some_and(|shown| same(shown, key));
    if key.is_some_and(|key| !known(key)) {
        return match request.path {
            "/health/live" => verdict(&[live(shared)]),
            "/health/ready" => verdict(&ready(shared).1),
            _ => Response::text(
                401,
                "a key is needed: send 'Authorization: Bearer KEY', as transferd watch-key has it\n".into(),
            ),
        };
    }
    match request.path {
        "/metrics" => {
            let asked = shared
                .status(WITHIN)
                .and_then(|status| Ok((status, shared.ask(WITHIN, |actor| actor.engine.counters())?)));
            match asked {
                Ok((status, counters)) => Response::text(200, metrics::render(&samples(&status, counters))),
                Err(error) => Response::text(503, error.message + "\n"),
            }
        }
        "/health/live" => report(shared, vec![live(shared)]),
        "/health/ready" => report(shared, ready(shared).1),
        "/health/deep" => {
            let (status, mut checks) = ready(shared);
            checks.extend(status.iter().flat_map(deep));
            report(shared, checks)
        }
        _ => Response::text(404, "there is: /metrics, /health/live, /health/ready, /health/deep\n".into()),
    }
}

/// Takes as long wherever they differ: hashes are compared so.
fn same(one: &str, other: &str) -> bool {
    blake3::hash(one.as_bytes()) == blake3::hash(other.as_bytes())
}

/// For whoever has no key.
fn verdict(checks: &[Check]) -> Response {
    let ok = checks.iter().all(|check| check.ok);
    Response::json(if ok { 200 } else { 503 }, format!("{{\"ok\":{ok}}}\n"))
}

fn report(shared: &Shared, checks: Vec<Check>) -> Response {
    let ok = checks.iter().all(|check| check.ok);
    let body = Body { node: &shared.me.node, incarnation: shared.me.incarnation, ok, checks };
    // A struct of texts and numbers always becomes JSON.
    let text = serde_json::to_string(&body).unwrap_or_else(|error| unreachable!("texts and numbers: {error}"));
    Response::json(if ok { 200 } else { 503 }, text + "\n")
}

/// It does not wait for the engine: one that is only busy must not be started again.
fn live(shared: &Shared) -> Check {
    // The engine takes the threads with it when it ends.
    let runs = !shared.threads.is_closed();
    Check::new("engine", runs, if runs { "runs" } else { "has ended" })
}

fn ready(shared: &Shared) -> (Option<Status>, Vec<Check>) {
    let start = Instant::now();
    let status = match shared.status(WITHIN) {
        Err(Error { message, .. }) => return (None, vec![Check::new("engine", false, message)]),
        Ok(status) => status,
    };
    let took = start.elapsed().as_nanos() as f64 / 1e6;
    let draining = if status.draining {
        Check::new("draining", false, "nothing new is taken on")
    } else {
        Check::new("draining", true, "no")
    };
    let listening = match (status.listening, &*status.address) {
        (false, _) => Check::new("listening", false, "connections are not accepted: start the daemon again"),
        (true, "") => Check::new("listening", true, "for local workers"),
        (true, address) => Check::new("listening", true, format!("at {address}")),
    };
    let checks = vec![Check::new("engine", true, format!("answered in {took:.2} ms")), listening, draining];
    (Some(status), checks)
}

fn deep(status: &Status) -> Vec<Check> {
    let mut checks: Vec<Check> = status
        .tiers
        .iter()
        .map(|tier| {
            let used = format!("{}: {} of {} bytes used", tier.health, tier.used_bytes, tier.limit_bytes);
            Check::new(tier.medium.clone(), tier.health == "good", used)
        })
        .collect();
    checks.extend(status.conductor.iter().map(|conductor| {
        let how = if conductor.connected { "connected to" } else { "does not answer at" };
        Check::new("conductor", conductor.connected, format!("{how} {}", conductor.address))
    }));
    checks
}

/// The engine's counters, and what only this process knows.
fn samples(status: &Status, mut counters: Vec<(String, u64)>) -> Vec<(String, u64)> {
    let node = &status.node;
    let mut own = |name: &str, value: u64| counters.push((format!(r#"{name}{{node="{node}"}}"#), value));
    own("pyengine_daemon_uptime_seconds", status.uptime_ms / 1000);
    own("pyengine_daemon_draining", status.draining.into());
    own("pyengine_daemon_clients", status.clients.len() as u64);
    own("pyengine_daemon_peers", status.peers.iter().filter(|peer| peer.connected).count() as u64);
    if let Some(conductor) = &status.conductor {
        own("pyengine_daemon_conductor_connected", conductor.connected.into());
    }
    counters.push((format!(r#"pyengine_daemon_info{{node="{node}",version="{}"}}"#, status.version), 1));
    counters
}

#[cfg(test)]
mod tests {
    //! Goal: an engine that hangs, and one that has failed, are told apart and told at all. Method: hold up the engine's own
    //! thread by a question that waits; then let one panic.
    use std::sync::mpsc::channel;

    use super::super::{Actor, Daemon, Happening, Question};
    use super::*;
    use crate::config::Config;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn asked(shared: &Shared, path: &str) -> Response {
        answer(shared, None, &Request { path, head_only: false, bearer: None })
    }

    #[test]
    fn who_has_no_key_learns_yes_or_no() {
        let daemon = Daemon::start(&Config::new("a", 1 << 20)).expect("a daemon starts");
        let show = |path, bearer| answer(&daemon.shared, Some("key"), &Request { path, head_only: false, bearer });
        for bearer in [None, Some(""), Some("ke"), Some("keys"), Some("KEY")] {
            for path in ["/metrics", "/health/deep", "/", "/health"] {
                assert_eq!(show(path, bearer).status, 401, "{path} {bearer:?}");
            }
            assert_eq!(show("/health/live", bearer).body, "{\"ok\":true}\n");
            // It has no way in.
            assert_eq!(show("/health/ready", bearer), Response::json(503, "{\"ok\":false}\n".into()));
        }
        assert!(show("/health/live", Some("key")).body.contains("\"node\":\"a\""));
        assert_eq!(show("/nothing", Some("key")).status, 404);
    }

    #[test]
    fn an_engine_that_hangs_is_not_ready_but_lives() {
        let daemon = Daemon::start(&Config::new("a", 1 << 20)).expect("a daemon starts");
        let shared = daemon.shared.clone();
        let status = |path: &str| asked(&shared, path).status;
        // A machine that is slow enough makes a good engine answer too late: what is to come is waited for.
        let becomes = |path: &str, wanted: u16, why: &str| {
            let until = Instant::now() + PATIENCE;
            loop {
                let Response { status, body, .. } = asked(&shared, path);
                if status == wanted && body.contains(why) {
                    return;
                }
                assert!(Instant::now() < until, "{path} is {status}, not {wanted} with {why:?}: {body}");
            }
        };
        assert_eq!(status("/health/live"), 200);
        // It has no way in.
        becomes("/health/ready", 503, "connections are not accepted");
        becomes("/health/deep", 503, "connections are not accepted");
        becomes("/metrics", 200, "");

        let (hang, until) = channel::<()>();
        let (tell, hangs) = channel();
        let question = move |_: &mut Actor| {
            tell.send(()).expect("the test waits for it");
            // Ends when the other end is dropped.
            let _ = until.recv();
        };
        shared.tell(Happening::Ask(Question(Box::new(question))));
        hangs.recv().expect("the engine has come to it");
        assert_eq!(["/health/live", "/health/ready", "/metrics"].map(status), [200, 503, 503]);
        let body = asked(&shared, "/health/ready").body;
        assert!(body.contains("does not answer within 1.0 s"), "{body}");
        // Its queue full, too.
        while shared.happenings.try_send(Happening::Completions).is_ok() {}
        assert_eq!(["/health/live", "/health/ready"].map(status), [200, 503]);
        drop(hang);
        becomes("/metrics", 200, "");

        shared.tell(Happening::Ask(Question(Box::new(|_| panic!("as a failure would")))));
        becomes("/health/ready", 503, "has stopped");
        becomes("/health/live", 503, "has ended");
    }
}
