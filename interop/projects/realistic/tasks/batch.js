module.exports = (items) =>
  items.map(async (item) => {
    if (item.bad) throw new Error(`item ${item.id} is bad`);
  });
