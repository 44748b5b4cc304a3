//! The syntax of options: query strings as parsed by Node's `querystring`, which accepts broken escapes.
//! `options` checks the values.

use std::borrow::Cow;

/// Maximum number of pairs, including empty ones; Node ignores the rest.
const MOST_PAIRS: usize = 1000;

/// One decoded `key=value`, and its position in the text.
pub(crate) struct Pair {
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) start: usize,
    /// Where the value starts; the end if there is no `=`.
    pub(crate) value_start: usize,
    pub(crate) end: usize,
}

pub(crate) fn pairs(text: &str) -> impl Iterator<Item = Pair> + '_ {
    let mut start = 0;
    text.split('&').take(MOST_PAIRS).filter_map(move |pair| {
        let at = start;
        let end = at + pair.len();
        start = end + 1;
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value_start = (at + key.len() + 1).min(end);
        (!pair.is_empty()).then(|| Pair { key: decode(key), value: decode(value), start: at, value_start, end })
    })
}

/// Decodes `+` as a space and `%41` as `A`. If the escapes are not valid UTF-8, the text is decoded byte by
/// byte, with the low byte of each UTF-16 unit, as in Node.
fn decode(text: &str) -> String {
    let spaced = text.replace('+', " ");
    // Node searches for the first escape as if the text contained no `+`.
    if !has_escape(text.replace('+', "").as_bytes()) {
        return spaced;
    }
    let units: Vec<u16> = spaced.bytes().map(u16::from).collect();
    let (bytes, clean) = unescape(&units);
    match String::from_utf8(bytes) {
        Ok(decoded) if clean => decoded,
        _ => {
            let units: Vec<u16> = spaced.encode_utf16().collect();
            String::from_utf8_lossy(&unescape(&units).0).into_owned()
        }
    }
}

fn has_escape(text: &[u8]) -> bool {
    text.windows(3).any(|three| three[0] == b'%' && three[1..].iter().all(u8::is_ascii_hexdigit))
}

/// The low bytes of the units with the escapes decoded, and whether every `%` started one.
fn unescape(units: &[u16]) -> (Vec<u8>, bool) {
    const PERCENT: u16 = b'%' as u16;
    let digit = |unit: u16| char::from_u32(unit.into())?.to_digit(16);
    let mut bytes = Vec::with_capacity(units.len());
    let mut clean = true;
    let mut rest = units;
    while let [unit, others @ ..] = rest {
        let escaped = match others {
            [high, low, ..] if *unit == PERCENT => digit(*high).zip(digit(*low)),
            _ => None,
        };
        match escaped {
            Some((high, low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = &others[2..];
            }
            None => {
                clean &= *unit != PERCENT;
                bytes.push(*unit as u8);
                rest = others;
            }
        }
    }
    (bytes, clean)
}

/// Encodes any text for a query string.
pub(crate) fn encode(text: &str) -> Cow<'_, str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~:/".contains(&byte);
    if text.bytes().all(plain) {
        return Cow::Borrowed(text);
    }
    let mut encoded = String::with_capacity(text.len() * 2);
    for byte in text.bytes() {
        match plain(byte) {
            true => encoded.push(byte.into()),
            false => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    Cow::Owned(encoded)
}
