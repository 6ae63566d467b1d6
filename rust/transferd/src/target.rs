//! `transferd target`: memory for others to write and read, nothing else.

use std::io::Write;

use serde::Serialize;
use transfer::error::Error;
use transfer::region::Access;

use crate::engine::{EngineArguments, REGION, size};
use crate::signals::Signals;

/// Flags.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    #[command(flatten)]
    engine: EngineArguments,
    /// Where benches connect; port 0: any free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen: String,
    /// How much memory
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    bytes: u64,
}

#[derive(Serialize)]
struct Ready<'a> {
    node: &'a str,
    address: &'a str,
    incarnation: u64,
    bytes: u64,
}

/// Serves until a signal. Prints one line of JSON on stdout when it can be connected to.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    Signals::held_back(|signals| {
        let endpoint = arguments.engine.start(Some(arguments.listen.clone()), |_| {})?;
        let bytes = usize::try_from(arguments.bytes).map_err(|_| Error::give_up("--bytes: more than there can be"))?;
        let region = endpoint.allocate(bytes, Access { read: true, write: true }, Some(REGION))?;
        let address = endpoint.address();
        let ready = Ready {
            node: &address.node,
            address: &address.address,
            incarnation: address.incarnation,
            bytes: region.bytes(),
        };
        let line = serde_json::to_string(&ready).map_err(|error| Error::bug(error.to_string()))?;
        // Without a reader it serves as well.
        let _ = writeln!(std::io::stdout(), "{line}");
        let result = signals.wait(&[], None).map(|_| ());
        endpoint.close();
        result
    })
}
