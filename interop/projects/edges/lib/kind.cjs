// What kind of thing a value is, and of an object which keys it has.
module.exports = function kind(value) {
  if (value === null) return "null";
  if (value instanceof Date) return "date";
  if (Array.isArray(value)) return value.map(kind);
  return typeof value === "object" ? Object.fromEntries(Object.keys(value).sort().map((key) => [key, kind(value[key])])) : typeof value;
};
