//! The options of a line as text: query-string syntax as Node's `querystring` reads it, which forgives broken escapes.

use std::borrow::Cow;

/// So many pairs are read, empty ones included; Node ignores what follows.
const MOST_PAIRS: usize = 1000;

/// One `key=value`, decoded, and where it stands in the text.
pub(crate) struct Pair {
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) start: usize,
    /// Where the value begins; the end if there is no `=`.
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

/// `+` is a space and `%41` an `A`. A text whose escapes are not those of UTF-8 is read byte by byte, for which Node
/// takes the low byte of each UTF-16 unit.
fn decode(text: &str) -> String {
    let spaced = text.replace('+', " ");
    // Node looks for the first escape in a value as if there were no `+` in it.
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

/// The low bytes of the units, escapes undone, and whether every `%` began one.
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

/// What a query string can hold of any text.
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
