//! The log as one JSON object a line, with the keys that the Python processes use too (`pyengine/logs.py`).

use std::fmt::Debug;
use std::io::Write;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Logs to stderr from now on.
pub fn begin(level: LevelFilter, node: String) {
    // Fails if this process logs already; then that log is used.
    let _ = tracing_subscriber::registry().with(JsonLines { node }.with_filter(level)).try_init();
}

struct JsonLines {
    node: String,
}

impl<S: Subscriber> Layer<S> for JsonLines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = line(&self.node, event).to_string();
        text.push('\n');
        // In one write, as other processes have the same stderr. If it is gone there is nobody to tell.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

fn line(node: &str, event: &Event<'_>) -> Value {
    let mut told = Told(Map::new());
    event.record(&mut told);
    let mut timestamp = String::new();
    // Writing to a text cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    let metadata = event.metadata();
    let level = metadata.level().as_str().to_lowercase();
    // Behind what was told: an event's own `node` is its peer's business.
    for (key, value) in [
        ("timestamp", &*timestamp),
        ("level", &*level),
        ("process", "transferd"),
        ("node", node),
        ("target", metadata.target()),
    ] {
        told.0.insert(key.into(), value.into());
    }
    Value::Object(told.0)
}

/// The fields of an event. Its text is the one called `message`.
struct Told(Map<String, Value>);

impl Told {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().into(), value.into());
    }
}

impl Visit for Told {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.put(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
}
