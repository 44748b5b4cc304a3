//! Printing to standard output, without a panic if the reader is gone. Errors go to standard error: see `failure`.

use crate::failure::Failure;
use std::io::{ErrorKind, Write};

/// Prints the text. If the reader has closed the pipe (`… | head`), the program exits with 1 and no message.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(Failure::AlreadyReported),
        Err(error) => Err(format!("could not write to standard output: {error}").into()),
        Ok(()) => Ok(()),
    }
}

/// Prints a line.
pub(crate) fn print_line(text: &str) -> Result<(), Failure> {
    print(&format!("{text}\n"))
}
